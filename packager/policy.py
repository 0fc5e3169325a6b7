"""Tolerances: named, versioned policies, and what overrides them.

A policy is data (``policies.toml``): bounds by precision, each with its reason. A target's facts, the manifest and
a manifest's target may override single bounds, for all outputs or for one. The verdict records the policy and every
deviation from it. Which outputs are score-like, and which come from arithmetic in [0, 1], is read off the graph.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from packager.errors import InternalError, ManifestError
from packager.graph import Node
from packager.model import Model, TensorSpec
from packager.names import nearest
from packager.parity import EPS, OutputRule, Tolerance, check_bound
from packager.precisions import coarser

if TYPE_CHECKING:
    from packager.manifest import Tolerance as ManifestTolerance
    from packager.room import TargetFacts

FILE = Path(__file__).with_name("policies.toml")
BOUNDS = tuple(bound.name for bound in fields(Tolerance))
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
UNIT_OPERATORS = frozenset({"Sigmoid", "HardSigmoid", "Softmax"})
"""Operators whose outputs come from arithmetic in [0, 1]: their rounding is that of 1.0 (see parity.OutputRule)."""
PLAIN = frozenset({"Identity", "Cast"})
MOVING = PLAIN | {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather"}
"""Operators that hand on the values of their first input, in the same places or in others."""


@dataclass(frozen=True)
class PrecisionBounds:
    """A policy's bounds for one precision; ``rounding`` as in :class:`packager.parity.OutputRule`."""

    tolerance: Tolerance
    rounding: float


@dataclass(frozen=True)
class Policy:
    """A named policy: its bounds by precision (``fp32``, ``fp16``, ``bf16``, ``int8``, ``fp8``, ``int4``)."""

    name: str
    summary: str
    precisions: Mapping[str, PrecisionBounds]


@dataclass(frozen=True)
class ToleranceOverride:
    """What somebody wants different from the policy; ``None`` leaves a bound as it is.

    ``place`` is where it was said, for messages: ``packager.toml: [tolerance.fp16]``. ``outputs`` holds what differs
    for single outputs, by exact name.
    """

    place: str
    bounds: Tolerance = field(default_factory=Tolerance)
    outputs: Mapping[str, Tolerance] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        place: str,
        bounds: Mapping[str, float | None],
        outputs: Mapping[str, Mapping[str, float | None]] | None = None,
    ) -> ToleranceOverride:
        """From plain numbers by the name of the bound.

        Raises:
            ManifestError: an unknown bound, or a value out of range; the message names the place.
        """
        each = {name: _tolerance(f"{place}: output '{name}'", values) for name, values in (outputs or {}).items()}
        return cls(place, _tolerance(place, bounds), each)


@dataclass(frozen=True)
class Resolved:
    """Bounds by output, and how they came about. ``deviations`` lists what isn't the policy's, in words."""

    policy: str
    precision: str
    tolerances: Mapping[str, Tolerance]
    rounding: float
    deviations: tuple[str, ...]

    @property
    def description(self) -> str:
        """What the verdict says: ``default-1``, or ``default-1, overridden: max_abs 0.01``."""
        return self.policy + (f", overridden: {'; '.join(self.deviations)}" if self.deviations else "")


@dataclass(frozen=True)
class Judging:
    """How the outputs of one target are judged: a rule each, which policy that is, in words, and for what precision.

    ``transformed`` are the rules against the transformed model, which the target runs: empty where its room knows of
    no closer ones than those against the reference.
    """

    rules: Mapping[str, OutputRule]
    description: str
    precision: str
    transformed: Mapping[str, OutputRule] = field(default_factory=dict)


@cache
def policies() -> Mapping[str, Policy]:
    """Every policy, by name.

    Raises:
        InternalError: ``policies.toml`` is malformed; every mistake is listed.
    """
    return parse_policies(FILE.read_text(encoding="utf-8"), FILE.name)


def parse_policies(text: str, source: str) -> dict[str, Policy]:
    """Policies from TOML. ``source`` names the text in messages.

    Raises:
        InternalError: it is malformed; every mistake is listed.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InternalError(f"{source}: {error}") from error
    problems: list[str] = []
    found: dict[str, Policy] = {}
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("summary"), str) or len(table) < 2:
            problems.append(f"{name}: needs a summary and a table per precision")
            continue
        precisions: dict[str, PrecisionBounds] = {}
        for precision, bounds in table.items():
            if precision == "summary":
                continue
            try:
                given = dict(bounds)
                rounding = check_bound("rounding", given.pop("rounding", 0.0))
                precisions[precision] = PrecisionBounds(Tolerance.from_dict(given), rounding)
                if not {"max_abs", "scaled", "cosine"} & set(given):
                    problems.append(f"{name}.{precision}: no bound that every float output has")
            except (TypeError, ValueError) as error:
                problems.append(f"{name}.{precision}: {error}")
        found[name] = Policy(name, table["summary"], precisions)
    if problems or not found:
        raise InternalError(f"{source}: " + ("; ".join(problems) or "no policy"))
    return found


def resolve(policy_name: str, precision: str, output_names: Iterable[str], *overrides: ToleranceOverride) -> Resolved:
    """Bounds of every output: the policy's, then the overrides in order.

    What is said of one output beats what is said of all, whoever says it.

    Raises:
        ManifestError: no such policy or precision, or an override names an output that doesn't exist.
    """
    base = _bounds(policy_name, precision)
    names = tuple(output_names)
    for override in overrides:
        for name in override.outputs:
            if name not in names:
                close = nearest(name, names)
                hint = f"did you mean '{close}'?" if close else f"outputs: {', '.join(names)}"
                raise ManifestError(f"{override.place}: a tolerance is given for '{name}', which is no output", hint)
    general = base.tolerance
    for override in overrides:
        general = _over(override.bounds, general)
    deviations = [_words(general, base.tolerance)] if general != base.tolerance else []
    tolerances: dict[str, Tolerance] = {}
    for name in names:
        own = general
        for override in overrides:
            own = _over(override.outputs.get(name, Tolerance()), own)
        tolerances[name] = own
        if own != general:
            deviations.append(f"output {name!r}: {_words(own, general)}")
    return Resolved(policy_name, precision, tolerances, base.rounding, tuple(deviations))


def rules(model: Model, resolved: Resolved) -> dict[str, OutputRule]:
    """A rule for every output that ``resolved`` has bounds for, with what the graph says of it.

    The policy's ``scaled`` is never tighter than one step of the output's own dtype: of two honest answers in half
    precision one may be rounded up and the other down. What the manifest says is left as it is.
    """
    axes, unit = score_axes(model), unit_outputs(model)
    steps = {spec.name: EPS.get(spec.dtype, 0.0) for spec in model.signature.outputs}
    least = _bounds(resolved.policy, resolved.precision).tolerance.scaled
    found = {}
    for name, asked in resolved.tolerances.items():
        policys = asked.scaled is not None and asked.scaled == least
        tolerance = replace(asked, scaled=max(least or 0.0, steps[name])) if policys else asked
        found[name] = OutputRule(tolerance, axes.get(name), resolved.rounding if name in unit else 0.0)
    return found


def rules_for(
    policy_name: str, precision: str, model: Model, *, excluded: frozenset[str] = frozenset()
) -> dict[str, OutputRule]:
    """Rules by the policy alone, for all outputs but the excluded ones.

    Raises:
        ManifestError: no such policy or precision.
    """
    return rules(model, resolve(policy_name, precision, _judged(model, excluded)))


def judging(
    policy_name: str,
    precision: str,
    model: Model,
    excluded: Iterable[tuple[str, str]],
    facts: TargetFacts,
    tolerance: ManifestTolerance,
    made: str | None = None,
) -> Judging:
    """How a target is judged: the policy, its room's facts, and the manifest.

    Args:
        policy_name: such as ``default-1``.
        precision: by which it is judged.
        made: the precision, as the manifest spells it, that a shared transform makes for the target.
        model: whose outputs are judged.
        excluded: outputs that aren't, with the reason.
        facts: the room's ``target.toml``.
        tolerance: the manifest's, that of the precision and of the target merged.

    Raises:
        ManifestError: no such policy or precision, or a tolerance for an output that doesn't exist.
    """
    skipped = frozenset(name for name, _ in excluded)
    room = ToleranceOverride.of(f"target.toml of {facts.kind}", facts.tolerance.get(precision, {}))
    asked = {name: bounds.model_dump(include=set(BOUNDS)) for name, bounds in tolerance.outputs if name not in skipped}
    manifest = ToleranceOverride.of("the manifest", tolerance.bounds.model_dump(include=set(BOUNDS)), asked)
    resolved = resolve(policy_name, precision, _judged(model, skipped), room, manifest)
    found = rules(model, resolved)
    room_run = facts.run_tolerance.get(made or "")
    near = {} if room_run is None else _near(resolved, Tolerance.from_dict(room_run))
    run = {name: replace(found[name], tolerance=tolerance) for name, tolerance in near.items()}
    return Judging(found, resolved.description, precision, run)


def _near(resolved: Resolved, known: Tolerance) -> dict[str, Tolerance]:
    """How near outputs must be to those of the transformed model: what the room knows of its runtime, and where
    somebody made a bound looser than the policy's, that."""
    usual = policies()[resolved.policy].precisions[resolved.precision].tolerance.to_dict()
    found: dict[str, Tolerance] = {}
    for name, tolerance in resolved.tolerances.items():
        bounds = known.to_dict()
        for bound, asked in tolerance.to_dict().items():
            before = usual[bound]
            if asked is None or before is None or bounds[bound] is None:
                continue
            if asked < before if bound in ("cosine", "top1") else asked > before:
                bounds[bound] = asked
        found[name] = Tolerance(**bounds)
    return found


def score_axes(model: Model) -> dict[str, int | None]:
    """For every output the axis of its classes if it is score-like, else ``None``.

    Score-like is what a Softmax or LogSoftmax makes (its axis, seen through Identity and Cast), and a rank-2 float
    output whose last dim is symbolic or at least 2.
    """
    return {spec.name: _score_axis(model, spec) for spec in model.signature.outputs}


def unit_outputs(model: Model) -> frozenset[str]:
    """Outputs whose values come from a Sigmoid or Softmax, perhaps moved about or cut since."""
    made = {spec.name: _producer(model, spec.name, MOVING) for spec in model.signature.outputs}
    return frozenset(
        name for name, node in made.items() if node is not None and not node.domain and node.op_type in UNIT_OPERATORS
    )


def _score_axis(model: Model, spec: TensorSpec) -> int | None:
    if spec.kind != "tensor" or spec.dtype not in FLOATS:
        return None
    node = _producer(model, spec.name, PLAIN)
    if node is not None and not node.domain and node.op_type in ("Softmax", "LogSoftmax"):
        return _softmax_axis(node, model.opset, spec)
    if spec.dims is None or len(spec.dims) != 2:
        return None
    last = spec.dims[-1]
    return 1 if not isinstance(last, int) or last >= 2 else None


def _softmax_axis(node: Node, opset: int, spec: TensorSpec) -> int | None:
    """The classes' axis, counted from the front where the rank is known.

    Before opset 13 a Softmax flattens from ``axis`` (default 1) on, so its classes are one axis only where all later
    dims are 1.
    """
    axis = node.integer("axis", -1 if opset >= 13 else 1)
    if spec.dims is None:
        return axis if opset >= 13 or axis == -1 else None
    rank = len(spec.dims)
    if not -rank <= axis < rank:
        return None
    axis %= rank
    return axis if opset >= 13 or all(dim == 1 for dim in spec.dims[axis + 1 :]) else None


def _producer(model: Model, name: str, through: frozenset[str]) -> Node | None:
    """The node of the main graph that made a value, seen through operators that hand it on."""
    made = {output: node for node in model.structure.graph.nodes for output in node.outputs if output}
    node = made.get(name)
    while node is not None and not node.domain and node.op_type in through and node.inputs:
        node = made.get(node.inputs[0])
    return node


def _judged(model: Model, excluded: frozenset[str]) -> tuple[str, ...]:
    return tuple(spec.name for spec in model.signature.outputs if spec.name not in excluded)


def _bounds(policy_name: str, precision: str) -> PrecisionBounds:
    known = policies()
    if policy_name not in known:
        close = nearest(policy_name, known)
        hint = f"did you mean '{close}'?" if close else f"policies: {', '.join(known)}"
        raise ManifestError(f"no tolerance policy '{policy_name}'", hint)
    bounds = known[policy_name].precisions
    if precision not in bounds:
        close = nearest(precision, bounds)
        hint = f"did you mean '{close}'?" if close else f"it has: {', '.join(bounds)}"
        raise ManifestError(f"policy '{policy_name}' says nothing of precision '{precision}'", hint)
    return bounds[precision]


def _tolerance(place: str, bounds: Mapping[str, float | None]) -> Tolerance:
    try:
        return Tolerance.from_dict(bounds)
    except ValueError as error:
        raise ManifestError(f"{place}: {error}") from error


def _over(mine: Tolerance, base: Tolerance) -> Tolerance:
    return Tolerance(
        **{**base.to_dict(), **{name: bound for name, bound in mine.to_dict().items() if bound is not None}}
    )


def _words(tolerance: Tolerance, base: Tolerance) -> str:
    """What differs, in words: ``max_abs 0.01, top1 0.9``."""
    before = base.to_dict()
    return ", ".join(f"{name} {bound:g}" for name, bound in tolerance.to_dict().items() if bound != before[name])


def judged_precision(model: Model, precision: str) -> str:
    """The precision a bundle is judged by: the coarser of the target's and the model's own, as policies name it.

    A bundle of an int8 model can't be nearer to the reference than one step of its own quantisation.
    """
    return coarser(precision, model.precision)
