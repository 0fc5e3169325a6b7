"""What in a model may surprise though it is no mistake: found cheaply, from the structure alone, when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from packager.graph import Structure

RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


@dataclass(frozen=True)
class Hazard:
    """Something in the model that may surprise: a stable code, a message that names the place, and a hint."""

    code: str
    message: str
    hint: str | None = None


def find_hazards(structure: Structure) -> list[Hazard]:
    """Every hazard of a model, in a fixed order."""
    found: list[Hazard] = []
    graph = structure.graph
    inputs = {value.name for value in graph.inputs}
    overridable = [tensor.name for tensor in graph.initializers if tensor.name in inputs]
    if overridable and structure.ir_version >= 4:
        shown = ", ".join(overridable[:3]) + (", ..." if len(overridable) > 3 else "")
        found.append(
            Hazard(
                "overridable-initializer",
                f"{len(overridable)} initializers are also graph inputs ({shown}) and count as defaults, not as inputs",
                "runtimes disagree on them; remove them from the graph's inputs",
            )
        )
    used = {node.domain for node in structure.walk()} | {""}
    local = {function.domain for function in structure.functions}
    imported = {domain for domain, _ in structure.opsets}
    for domain in sorted(used - imported - local):
        hint = "add the import, or export the model again"
        found.append(Hazard("missing-import", f"operators of domain '{domain}' are used but not imported", hint))
    for domain in sorted(imported - used - local):
        found.append(Hazard("unused-import", f"operator set '{domain}' is imported and not used"))
    for node in structure.walk():
        if node.op_type in RANDOM_OPERATORS and not node.domain:
            hint = "its outputs differ from run to run"
            found.append(Hazard("random", f"node {node.label} draws random numbers", hint))
        if node.op_type == "BatchNormalization" and node.integer("training_mode", 0) == 1:
            found.append(
                Hazard("training-mode", f"node {node.label} is in training mode", "export the model in evaluation mode")
            )
    for value in graph.outputs:
        if value.type.kind != "tensor":
            found.append(
                Hazard(
                    "non-tensor-output",
                    f"output '{value.name}' is a {value.type}, which most runtimes can't return",
                    "export the classifier without ZipMap (zipmap=False)",
                )
            )
    if structure.has_training_info:
        found.append(Hazard("training-info", "the file carries training information, which is not deployed"))
    return found
