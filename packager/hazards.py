"""What in a model may surprise though it is no mistake: found cheaply, from the structure alone, when it is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packager.graph import Graph, Node, Structure, Tensor

RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


def draws(node: Node, known: Mapping[str, Sequence[float]]) -> bool:
    """Whether a node draws random numbers: an operator made for it, or a Dropout in training mode.

    A seed makes a runtime repeat itself, not two runtimes agree. ``known`` are values of scalars, by name; a Dropout
    whose training mode isn't among them is taken to be in it.
    """
    if node.domain or node.op_type != "Dropout":
        return not node.domain and node.op_type in RANDOM_OPERATORS
    ratio, training = (node.inputs[index] if len(node.inputs) > index else "" for index in (1, 2))
    if not training or known.get(training, (1.0,))[0] == 0:
        return False
    return not ratio or known.get(ratio, (1.0,))[0] != 0


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
    found += _traced(structure)
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


def _traced(structure: Structure) -> list[Hazard]:
    """What an exporter leaves that runs a model once and writes down what it did, or forgets to switch training off."""
    found = []
    constants = constant_tensors(structure.graph)
    for node in structure.walk():
        if node.domain:
            continue
        if node.op_type == "If" and node.inputs and node.inputs[0] in constants:
            branch = _truth(constants[node.inputs[0]])
            message = f"node {node.label} always takes its {branch} branch: the condition is a constant"
            found.append(Hazard("frozen-branch", message, "a condition on the input was frozen when it was exported"))
        switch = constants.get(node.inputs[2]) if node.op_type == "Dropout" and len(node.inputs) > 2 else None
        if switch is not None and _truth(switch) == "then":
            message = f"node {node.label} is in training mode"
            found.append(Hazard("training-mode", message, "export the model in evaluation mode"))
    inputs = {value.name for value in structure.graph.inputs}
    outputs = {value.name for value in structure.graph.outputs}
    for node in structure.graph.nodes:
        copies = node.op_type == "Identity" and not node.domain and bool(node.inputs and node.outputs)
        if copies and node.inputs[0] in inputs and node.outputs[0] in outputs:
            message = f"output '{node.outputs[0]}' is input '{node.inputs[0]}' as it came: node {node.label}"
            found.append(Hazard("output-is-input", message, "leave it out, if nothing should have happened to it"))
    return found


def constant_tensors(graph: Graph) -> dict[str, Tensor]:
    """The constants of a graph by name: initializers, and what Constant nodes give. Inputs with defaults count."""
    held = {tensor.name: tensor for tensor in graph.initializers}
    for node in graph.nodes:
        for attribute in node.attributes if node.op_type == "Constant" and not node.domain else ():
            if attribute.tensors and node.outputs:
                held[node.outputs[0]] = attribute.tensors[0]
    return held


def _truth(tensor: Tensor) -> str:
    numbers = tensor.numbers()
    return "constant" if not numbers else "then" if numbers[0] else "else"
