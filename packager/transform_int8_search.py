"""Which nodes of an int8 model must stay in float: found by leaving each out in turn and seeing what that gives back.

The error of one layer, compared with its own output, says little: the layer that costs a transformer most is off by
1 % of its (outlying) largest value. So the answer is measured where it counts. Every quantised node, and every kind of
operator as a whole (six attention masks out of range hide behind each other), is put back into float alone, the worst
golden case is run, and what the outputs gain is its rank. Then the best, the best two, four and so on stay in float
until all cases pass. What costs more than fp16 would is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packager.errors import ModelError, Refused
from packager.float16_rules import constant
from packager.model import open_model
from packager.transform import Context, Outcome
from packager.transform_drift import drift, first_diverging, gains, load_session, run_session
from packager.transform_graphs import drop_dead
from packager.transform_search import Goal, Trial, excess, failure, goal, trial

if TYPE_CHECKING:
    import onnx_ir as ir

    from packager.goldens import GoldenCase

MAX_PROBES = 64
"""Most single nodes that are left out in turn: those that drift most."""
MAX_FLOAT_SHARE = 1 / 3
"""Most of the weights that may stay float32: with more, fp16 is smaller."""
LIGHT = 0.01
"""Share of the weights up to which a node is kept along with the one it feeds."""
_LISTED = 12

Make = Callable[[Collection[str]], Outcome]


@dataclass(frozen=True)
class Candidate:
    """Nodes that may stay in float together, and what messages call them."""

    label: str
    nodes: tuple[str, ...]
    gain: float = 0.0


def searched(make: Make, before: Path, context: Context, name: str, judged: str = "int8") -> Outcome:
    """Quantise; where that leaves the policy, keep nodes in float until it doesn't.

    Args:
        make: quantises the model without the nodes of these names.
        before: the model to quantise, all of its nodes named.
        context: golden cases and rules.
        name: of the precision.
        judged: the precision as policies name it.

    Raises:
        Refused: the outputs still leave the policy, or what must stay in float is so large that fp16 is smaller.
    """
    outcome, wanted = make(()), goal(before, context, judged)
    path = _saved(outcome.model, context.folder / f"{name}-tried.onnx")
    tried = trial(path, wanted)
    if tried.case is None:
        return outcome
    drifts = drift(before, path, tried.case.inputs)
    first = first_diverging(drifts)
    quantised = _quantised(before, path)
    added = gains(drifts)
    worst = {each.node: added[each.tensor] for each in sorted(drifts, key=lambda each: added[each.tensor])}
    shares = _shares(before, quantised)
    feeders = _feeders(before, shares)
    found = [
        each
        for each in _candidates(quantised, worst, feeders)
        if sum(map(shares.__getitem__, each.nodes)) <= MAX_FLOAT_SHARE
    ]
    ranked = _ranked(found, make, path, tried, wanted)
    kept: dict[str, Candidate] = {}
    failed = tried
    for count in _doubling(len(ranked)):
        kept = {node: each for each in ranked[:count] for node in each.nodes}
        share = sum(shares.get(node, 0.0) for node in kept)
        if share > MAX_FLOAT_SHARE:
            break
        outcome = make(kept)
        failed = trial(_saved(outcome.model, path), wanted)
        if failed.case is None:
            return Outcome(outcome.model, (*outcome.notes, *_notes(ranked[:count], share, judged)))
    begins = f"\n  the first to drift: {first}" if first else ""
    raise Refused(
        failure(name, failed, drifts, len(kept)) + begins,
        "use fp16 or fp32 for this target, give goldens that are like real inputs, or name what stays in float "
        "(`keep` in the manifest's target)",
    )


def _notes(kept: Iterable[Candidate], share: float, judged: str) -> tuple[str, ...]:
    kept = tuple(kept)
    notes = [f"kept in float: {each.label} ({judged} costs {each.gain:.0%} of what the policy allows)" for each in kept]
    if len(notes) > _LISTED:
        notes = [*notes[:_LISTED], f"kept in float: {len(notes) - _LISTED} more nodes that drift"]
    return (*notes, f"{share:.0%} of the quantisable weights stay in float, so that the outputs hold")


def _saved(model: ir.Model, path: Path) -> Path:
    import onnx_ir as ir

    ir.save(model, path)
    return path


def _quantised(before: Path, after: Path) -> dict[str, str]:
    """Nodes of the main graph that the conversion made integer: name to label."""
    kept = open_model(after).structure.graph
    dequantised = {name for node in kept.nodes if node.op_type == "DequantizeLinear" for name in node.outputs}
    float_nodes = {node.name for node in kept.nodes if not dequantised.intersection(node.inputs)}
    nodes = open_model(before).structure.graph.nodes
    return {node.name: node.label for node in nodes if node.name and node.name not in float_nodes}


def _feeders(before: Path, shares: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """By quantised node: the quantised nodes without weights to speak of that make its inputs."""
    nodes = open_model(before).structure.graph.nodes
    makers = {name: node.name for node in nodes for name in node.outputs if shares.get(node.name, 1.0) < LIGHT}
    return {
        node.name: tuple(dict.fromkeys(makers[name] for name in node.inputs if name in makers))
        for node in nodes
        if node.name in shares
    }


def _candidates(
    quantised: dict[str, str], worst: dict[str, float], feeders: Mapping[str, tuple[str, ...]]
) -> list[Candidate]:
    """Single nodes, those that drift most where there are too many, and all nodes of one operator.

    What reaches a node rounded is wrong before it computes, so a node comes with what feeds it.
    """
    by_drift = sorted(quantised, key=lambda name: -worst.get(quantised[name], 0.0))[:MAX_PROBES]
    single = [Candidate(quantised[name], (name, *feeders[name])) for name in quantised if name in by_drift]
    by_type: dict[str, list[str]] = {}
    for name, label in quantised.items():
        by_type.setdefault(label.partition(" ")[0], []).append(name)
    several = [
        Candidate(f"all {len(names)} {operator}", tuple(names))
        for operator, names in by_type.items()
        if 1 < len(names) < len(quantised)
    ]
    return [*several, *single]


def _ranked(found: list[Candidate], make: Make, path: Path, tried: Trial, wanted: Goal) -> list[Candidate]:
    """Those that give something back, the most first: by how much of what the rules allow the outputs gain."""
    assert tried.case is not None  # noqa: S101 - for the type checker
    base = _excess(tried.path, tried.case, wanted)
    measured: list[Candidate] = []
    for each in found:
        try:
            left = _excess(_saved(make(each.nodes).model, path), tried.case, wanted)
        except (ModelError, Refused):
            continue  # it can't be left out alone, or nothing is left without it
        measured.append(Candidate(each.label, each.nodes, base - left))
    return sorted((each for each in measured if each.gain > 0), key=lambda each: -each.gain)


def _excess(path: Path, case: GoldenCase, wanted: Goal) -> float:
    session = load_session(path, path.parent, quantized=True)
    return excess(run_session(session, list(case.outputs), case.inputs), case, wanted.rules)


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and at last ``most``."""
    count = 1
    while count < most:
        yield count
        count *= 2
    if most:
        yield most


def _shares(before: Path, quantised: Collection[str]) -> dict[str, float]:
    """How much of all weights that nodes of ``quantised`` read belongs to each of them."""
    import onnx_ir as ir

    sizes = {
        node.name: sum(tensor.size for value in node.inputs if (tensor := constant(value)) is not None)
        for node in ir.load(before).graph
        if node.name in quantised
    }
    total = sum(sizes.values()) or 1
    return {str(name): size / total for name, size in sizes.items()}


def restore(before: Path, after: Path, names: Collection[str]) -> ir.Model:
    """The quantised model of ``after`` with the named nodes reading what they read in ``before``, not dequantised.

    Leaving a node out of ONNX Runtime's quantiser doesn't do that: its input stays quantised if another node's is.
    """
    import onnx_ir as ir

    source, model = ir.load(before), ir.load(after)
    weights = source.graph.initializers
    values = {value.name: value for node in model.graph for value in node.outputs}
    values |= {value.name: value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    nodes = {node.name: node for node in model.graph}
    for original in source.graph:
        node = nodes.get(original.name) if original.name in names else None
        for index, value in enumerate(original.inputs if node is not None else ()):
            if value is None or node is None or index >= len(node.inputs):
                continue
            if value.name not in values and value.name in weights:
                made = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
                model.graph.register_initializer(made)
                values[value.name] = made
            if value.name in values:
                node.replace_input_with(index, values[value.name])
    drop_dead(model)
    return model
