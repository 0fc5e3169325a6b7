"""Refusals that every room makes alike: what is beyond its ``target.toml``, named before anything is built."""

from __future__ import annotations

from collections.abc import Sequence

from packager.errors import Objection, Refused, node_lines
from packager.goldens import GoldenSet
from packager.graph import Node, format_dims
from packager.manifest_text import dotted
from packager.model import Model, Signature
from packager.room import Limits, PlanRequest, TargetFacts
from packager.shapes import pinnable

ONNX = "ai.onnx"


def check_precision(facts: TargetFacts, precision: str) -> None:
    """Refuse a precision that the room doesn't make.

    Raises:
        Refused: with those it makes.
    """
    if precision not in facts.precisions:
        raise Refused(
            f"{facts.title} bundles have no precision '{precision}'", f"choose one of {', '.join(facts.precisions)}"
        )


def check_shapes(facts: TargetFacts, target: str, signature: Signature, inputs: GoldenSet) -> None:
    """Refuse free dims where the runtime compiles for one size, before any work is put into the model.

    Args:
        facts: of the room.
        target: name of the target, for the line to add to the manifest.
        signature: with the dims that are pinned already.
        inputs: golden inputs; the first that fits gives the sizes of the line.

    Raises:
        Refused: inputs have free dims; the hint is the line that pins them.
    """
    free = pinnable(signature)
    loose = [
        spec for spec in signature.inputs if spec.dims is None or any(not isinstance(dim, int) for dim in spec.dims)
    ]
    if not facts.limits.fixed_shapes or not loose:
        return
    listed = "; ".join(
        f"input '{spec.name}' is {spec.dtype}{'' if spec.dims is None else format_dims(spec.dims)}" for spec in loose
    )
    unranked = [spec.name for spec in loose if spec.dims is None]
    if unranked:
        hint = f"declare the shape of {', '.join(unranked)} when exporting the model"
    else:
        sizes = {key: _size(signature, inputs, key) for key in free}
        pins = ", ".join(f"{dotted((key,))} = {size}" for key, size in sizes.items())
        hint = f"add to [{dotted(('targets', target))}]: shapes = {{ {pins} }}"
    raise Refused(f"{facts.title} bundles are compiled for fixed shapes, and {listed}", hint)


def _size(signature: Signature, inputs: GoldenSet, key: str) -> int:
    """The size that a free dim has in the golden inputs; 1 where it has none, or 0."""
    for case in inputs.cases:
        for spec in signature.inputs:
            array = case.inputs.get(spec.name)
            for axis, dim in enumerate(spec.dims or ()):
                if array is not None and key in (dim, f"{spec.name}:{axis}") and array.ndim > axis:
                    return max(int(array.shape[axis]), 1)
    return 1


def check_versions(model: Model, limits: Limits, reader: str, advice: str = "") -> None:
    """Refuse a model whose operator sets or IR version the runtime doesn't read.

    Args:
        model: as the room gets it.
        limits: of the room. A domain that isn't named in it has no limit.
        reader: the runtime, as the message should call it.
        advice: what to do about it, where there is more to say than to export for those versions.

    Raises:
        Refused: every version beyond the limits is named.
    """
    found = [
        f"opset {version} of {domain or ONNX}, {reader} reads up to {limits.opset[domain or ONNX]}"
        for domain, version in model.structure.opsets
        if version > limits.opset.get(domain or ONNX, version)
    ]
    if limits.ir is not None and model.structure.ir_version > limits.ir:
        found.append(f"ONNX IR version {model.structure.ir_version}, {reader} reads up to {limits.ir}")
    if found:
        raise Refused(
            f"the model is newer than what {reader} reads:" + "".join(f"\n  {line}" for line in found),
            advice or "export it for those versions; what can be lowered exactly has been",
        )


def check_operators(request: PlanRequest, reader: str) -> None:
    """Refuse operators, attributes and domains of operators that ``target.toml`` says the runtime never takes.

    Calls of the model's own functions are no operators; what they are made of is looked at.

    Raises:
        Refused: every such node is named.
    """
    limits, structure = request.facts.limits, request.model.structure
    local = {(function.domain, function.name) for function in structure.functions}
    found = [
        Objection(node.label, reason)
        for node in structure.walk()
        if (node.domain, node.op_type) not in local and (reason := _objection(node, limits))
    ]
    check_nodes(found, f"{reader} can't run the model", "export the model without them, or choose another target")


def check_nodes(found: Sequence[Objection], heading: str, hint: str) -> None:
    """Refuse a model for nodes, if there are any.

    Raises:
        Refused: every one is named, in the message and as data.
    """
    if found:
        raise Refused(f"{heading}:{node_lines(found)}", hint, found)


def _objection(node: Node, limits: Limits) -> str:
    domain = node.domain or ONNX
    if limits.domains and domain not in limits.domains:
        return f"only operators of {', '.join(limits.domains)} are known there"
    if domain in limits.refused_domains:
        return f"operators of {domain} are unknown there"
    if node.operator in limits.refused_operators:
        return limits.refused_operators[node.operator]
    names = [f"{node.operator}.{attribute.name}" for attribute in node.attributes]
    return next((limits.refused_attributes[name] for name in names if name in limits.refused_attributes), "")
