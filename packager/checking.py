"""What ONNX's own checker and shape inference say of a model: schemas, and shapes and dtypes that contradict.

ONNX Runtime is more lenient than either. It runs models with a stale shape in the middle, by which a target's toolchain
may lay out memory, so what is found is a hazard though the reference answers. What only the checker minds, and every
runtime takes, isn't told: an input or output of unknown rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packager.graph import Structure, printable
from packager.hazards import Hazard
from packager.model import Model

CHECKED_BYTES = 256 << 20
"""A larger .onnx file isn't given to the onnx checker, which reads all of it into memory twice."""

UNRANKED = "Field 'shape' of 'type' is required but missing"
FAULT = re.compile(
    r"\(op_type:(.*?)(?:, node name: (.*?))?\): \[\w+InferenceError\] (.*?)(?=\s*\(op_type:|$)", re.DOTALL
)
"""A node's part of a message of shape inference: operator, name where it has one, and what is wrong."""

MOST = 5
"""Contradictions told; one in front makes others behind it."""


def is_known(model: Model) -> bool:
    """Whether the installed onnx knows the model's operator set and format, and the file isn't too large for it."""
    import onnx

    newest = onnx.defs.onnx_opset_version()
    fits = model.bytes <= CHECKED_BYTES and model.structure.ir_version <= onnx.IR_VERSION
    return fits and model.opset <= newest


def objection(path: Path) -> str:
    """What the onnx checker says against a file, by the schemas alone; empty for nothing."""
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def contradictions(path: Path, structure: Structure) -> Iterator[str]:
    """Declared shapes and dtypes that aren't those which follow from the inputs, node by node."""
    import onnx

    proto = onnx.load(path, load_external_data=False)
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        faults = FAULT.findall(text)
        for operator, name, reason in faults:
            yield f"node {_label(structure, operator, name)}: {printable(reason.strip())}"
        if not faults:
            yield printable(text[:600])


def _label(structure: Structure, operator: str, name: str) -> str:
    """How messages name a node of which onnx tells operator and name; one without a name is found if it is the only."""
    found = [node.label for node in structure.walk() if node.op_type == operator and node.name == name]
    return found[0] if len(found) == 1 else printable(f"{operator} '{name}'" if name else f"{operator} (unnamed)")


def static_hazards(model: Model) -> list[Hazard]:
    """What the checker and shape inference say; nothing for models that the installed onnx doesn't know."""
    if not is_known(model):
        return []
    found = []
    against = objection(model.path)
    if against and UNRANKED not in against:
        hint = "export it again; a runtime stricter than ONNX Runtime refuses it"
        found.append(Hazard("schema", f"the onnx checker objects: {printable(against[:600])}", hint))
    hint = "run onnx.shape_inference over the model without its stale shapes, or export it again"
    told = list(contradictions(model.path, model.structure))
    more = f" (and {len(told) - MOST} more)" if len(told) > MOST else ""
    found += [
        Hazard("shape", f"a declared shape or dtype contradicts what follows: {text}{more}", hint)
        for text in told[:MOST]
    ]
    return found


__all__ = ["CHECKED_BYTES", "contradictions", "is_known", "objection", "static_hazards"]
