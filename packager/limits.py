"""Refusals that every room makes alike: what is beyond its ``target.toml``, named before anything is built."""

from __future__ import annotations

from packager.errors import Refused
from packager.model import Model
from packager.room import Limits, PlanRequest, TargetFacts

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
    """Refuse operators, and domains of operators, that ``target.toml`` says the runtime never takes.

    Raises:
        Refused: every such node is named.
    """
    limits = request.facts.limits
    found = []
    for node in request.model.structure.walk():
        if node.domain in limits.refused_domains:
            found.append(f"node {node.label}: {reader} has no operators of {node.domain}")
        elif node.operator in limits.refused_operators:
            found.append(f"node {node.label}: {limits.refused_operators[node.operator]}")
    if found:
        raise Refused(
            f"{reader} can't run the model:" + "".join(f"\n  {line}" for line in found),
            "export the model without them, or choose another target",
        )
