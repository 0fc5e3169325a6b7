"""Half precision: float16 and bfloat16, with what can't bear it kept in float32 and named.

What stays is decided twice. First by rule (:mod:`packager.float16_rules`), from the graph and its constants alone.
Then, where golden cases are at hand, by search: the converted model runs with every intermediate result truly rounded
to half (:func:`packager.float16_rounding.round_between`); where its outputs leave the policy, the nodes that overflow
or add the most error stay in float32 (their large weights stored in half and cast), and it is tried again. A model
that still drifts is refused, by node.

bfloat16 has float32's range and 8 bits of significand; ONNX gives fewer operators bfloat16 than float16, and the
rest gets Casts around it. ONNX Runtime's CPU provider runs hardly any of them, so a bfloat16 model is judged by that
same float32 run with rounding to bfloat16 between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from packager.errors import Refused
from packager.float16_rewrite import graphs_of, rewrite
from packager.float16_rounding import round_between
from packager.float16_rules import DEFAULT, kept_by_rule, label_of
from packager.float16_slots import is_float32
from packager.float16_types import infer_types
from packager.model import Model, Signature, TensorSpec, open_model
from packager.names import nearest
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_drift import NodeDrift, drift, gains
from packager.transform_search import MAX_SEARCH_BYTES, Trial, failure, goal, trial

if TYPE_CHECKING:
    import onnx_ir as ir

Half = Literal["fp16", "bf16"]
BF16_OPSET = 13
MAX_ROUNDS = 12
_SHOWN, _LISTED = 3, 12


@dataclass(frozen=True)
class _Half:
    """The settings both passes share. ``keep_io`` leaves the signature float32. ``keep`` names nodes (or tensors they
    make) to leave in float32, ``keep_types`` operators. ``search`` runs the golden cases to find what else must stay.
    """

    name: ClassVar[Half]
    keep_io: bool = True
    keep: tuple[str, ...] = ()
    keep_types: tuple[str, ...] = DEFAULT
    search: bool = True

    def step(self) -> Step:
        """The line of the plan."""
        extra = sorted(set(self.keep_types) - set(DEFAULT))
        left_out = sorted(set(DEFAULT) - set(self.keep_types))
        settings = [("signature", "stays fp32" if self.keep_io else f"becomes {self.name}")]
        settings += [("kept in fp32", ", ".join(self.keep))] if self.keep else []
        settings += [("operators kept in fp32 too", ", ".join(extra))] if extra else []
        settings += [("operators not kept in fp32", ", ".join(left_out))] if left_out else []
        settings += [("search for nodes that drift", "yes" if self.search else "no")]
        return Step(f"Converting to {self.name}", tuple(settings))

    def signature(self, before: Signature) -> Signature:
        """Unchanged; with ``keep_io=False`` float32 tensors become half, except sequences and the like."""
        if self.keep_io:
            return before
        to = {"fp16": "float16", "bf16": "bfloat16"}[self.name]

        def half(spec: TensorSpec) -> TensorSpec:
            return replace(spec, dtype=to) if spec.kind == "tensor" and spec.dtype == "float32" else spec

        return Signature(tuple(map(half, before.inputs)), tuple(map(half, before.outputs)))

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Convert.

        Raises:
            Refused: the model holds local functions, ``keep`` names nothing in it, or it drifts past the policy
                whatever is kept; nodes are named.
        """
        import onnx_ir as ir

        if model.functions:
            named = ", ".join(sorted(function.name for function in model.functions.values())[:_SHOWN])
            raise Refused(f"the model has local functions ({named}), which can't be converted", "inline them first")
        opset = model.graph.opset_imports.get("", BF16_OPSET)
        if self.name == "bf16" and opset < BF16_OPSET:
            hint = f"raise it first: opset = {BF16_OPSET}"
            raise Refused(f"bfloat16 needs opset {BF16_OPSET}, where Cast takes it; the model has {opset}", hint)
        cases = context.goldens.cases if self.search else ()
        size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
        if not cases or size > MAX_SEARCH_BYTES:
            notes = _convert(model, self, {})
            if cases:
                notes += (f"not searched for nodes that drift: {size / 1e9:.1f} GB of weights are too many to run",)
            return Outcome(model, notes)
        before = context.folder / f"{self.name}-before.onnx"
        ir.save(model, before, external_data=f"{before.name}.data" if size > MAX_SEARCH_BYTES // 4 else None)
        found = _search(self, before, context)
        notes = _convert(model, self, found)
        return Outcome(model, notes)


@dataclass(frozen=True)
class Float16(_Half):
    """float16: half the bytes, 11 bits of significand, numbers up to 65504."""

    name: ClassVar[Half] = "fp16"


@dataclass(frozen=True)
class BFloat16(_Half):
    """bfloat16: half the bytes, 8 bits of significand, the range of float32."""

    name: ClassVar[Half] = "bf16"


def _low(half: Half) -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType.FLOAT16 if half == "fp16" else ir.DataType.BFLOAT16


def _convert(model: ir.Model, settings: _Half, found: Mapping[str, str]) -> tuple[str, ...]:
    """Convert in place; ``found`` maps tensors whose nodes stay, beside those of the settings, to the reason."""
    import ml_dtypes

    infer_types(model)
    low = _low(settings.name)
    limits = ml_dtypes.finfo(low.numpy())
    graphs = graphs_of(model)
    named = _named(graphs, settings.keep)
    kept = kept_by_rule(graphs, settings.keep_types, float(limits.max), float(limits.smallest_normal))
    by_rule = {node: why for node, why in kept.reasons.items() if any(map(is_float32, (*node.inputs, *node.outputs)))}
    searched = {node: found[name] for name, node in _makers(graphs).items() if name in found}
    changed = rewrite(model, {*kept.reasons, *named, *searched}, low, keep_io=settings.keep_io, stored=searched)
    if not changed:
        raise Refused(
            f"nothing in the model can become {settings.name}: no float32 operator takes it at this opset, or all are "
            "kept in fp32",
            "use fp32 or raise the opset" if settings.name == "bf16" else "use fp32 for this target",
        )
    notes = [f"kept in fp32 as asked: {label_of(node)}" for node in named]
    notes += [f"kept in fp32: {label_of(node)} ({why})" for node, why in list(searched.items())[:_LISTED]]
    notes += [f"kept in fp32: {len(searched) - _LISTED} more nodes that drift"] if len(searched) > _LISTED else []
    groups: dict[str, list[str]] = {}
    for node, why in by_rule.items():
        groups.setdefault(why, []).append(label_of(node))
    for why, labels in groups.items():
        more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
        notes.append(f"kept in fp32 by rule: {', '.join(labels[:_SHOWN])}{more} ({why})")
    return tuple(notes)


def _makers(graphs: Iterable[ir.Graph]) -> dict[str, ir.Node]:
    return {value.name: node for graph in graphs for node in graph for value in node.outputs if value.name}


def _named(graphs: Mapping[ir.Graph, ir.Node | None], keep: Iterable[str]) -> list[ir.Node]:
    """The nodes of these names, or that make the tensors of these names.

    Raises:
        Refused: there is none.
    """
    known = _makers(graphs) | {node.name: node for graph in graphs for node in graph if node.name}
    for name in keep:
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean '{close}'?" if close else "name a node of the model, or a tensor that one makes"
            raise Refused(f"keep: no node '{name}'", hint)
    return [known[name] for name in keep]


def _search(settings: _Half, before: Path, context: Context) -> dict[str, str]:
    """Tensors whose nodes must stay float32 beyond the rules, with the reason of each.

    Raises:
        Refused: the outputs still leave the policy.
    """
    model, wanted = open_model(before), goal(before, context, settings.name)
    found: dict[str, str] = {}
    drifts: tuple[NodeDrift, ...] = ()
    tried = Trial(before, None)
    for number in range(MAX_ROUNDS):
        tried = trial(_rounded(settings, before, context, found), wanted)
        if tried.case is None:
            return found
        drifts = drift(before, tried.path, tried.case.inputs)
        fresh = _choose(drifts, model, settings.name, found, 2**number)
        if not fresh:
            break
        found |= fresh
    raise Refused(
        failure(settings.name, tried, drifts, len(found)),
        "use fp32 for this target, or keep more of the model in fp32 (keep, keep_types)",
    )


def _rounded(settings: _Half, before: Path, context: Context, found: Mapping[str, str]) -> Path:
    """Convert with these nodes kept and with rounding between nodes; the signature stays float32 here."""
    import onnx_ir as ir

    model = ir.load(before)
    _convert(model, replace(settings, keep_io=True), found)
    round_between(model, _low(settings.name))
    path = context.folder / f"{settings.name}-rounded.onnx"
    ir.save(model, path)
    return path


def _choose(
    drifts: Sequence[NodeDrift], model: Model, half: Half, found: Mapping[str, str], most: int
) -> dict[str, str]:
    """Tensors whose makers to keep next: all that touch values out of range, else those that add the most error.

    ``most`` bounds the latter; each comes with the nodes that make its inputs, since what reaches a node rounded is
    wrong before it computes.
    """
    import ml_dtypes

    limit = float(ml_dtypes.finfo(np.float16 if half == "fp16" else ml_dtypes.bfloat16).max)
    nodes = model.structure.graph.nodes
    by_tensor = {each.tensor: each for each in drifts}
    chosen: dict[str, str] = {}
    over = {each.tensor for each in drifts if each.reference_max > limit}
    for node in nodes:
        touched = [name for name in (*node.outputs, *node.inputs) if name in over]
        if touched:
            size = max(by_tensor[name].reference_max for name in touched)
            chosen |= {name: f"overflows: max {size:.2g}" for name in node.outputs if name}
    fresh = {name: why for name, why in chosen.items() if name not in found}
    if fresh:
        return fresh
    added = gains(drifts)
    ranked = sorted((each for each in drifts if added[each.tensor] > 0), key=lambda each: -added[each.tensor])
    makers = {name for node in nodes if node.op_type != "Constant" for name in node.outputs if name}
    count = 0
    for each in ranked:
        around = [each.tensor, *(name for name in each.inputs if name in makers)]
        new = [name for name in around if name not in found and name not in fresh]
        fresh |= {name: _why(each if name == each.tensor else by_tensor.get(name), each) for name in new}
        count += bool(new)
        if count >= most:
            break
    return fresh


def _why(own: NodeDrift | None, cause: NodeDrift) -> str:
    if own is not cause:
        return f"feeds {cause.node}, which drifts"
    if cause.nan or cause.inf:
        return "gives NaN or infinity where the reference doesn't"
    return f"drifts: off by {cause.severity:.1%} of its magnitude"


__all__ = ["DEFAULT", "BFloat16", "Float16"]
