"""The second witness of golden outputs: what ONNX's own reference evaluator says of the cases that the reference ran.

The reference is a runtime like others, and has faults of its own: a bundle that shares one would pass. The evaluator is
slow and plain, written from the standard, and the two have no code in common. Where they disagree by more than kernels
of one operator may, nobody can say from here which is right, so it is a hazard of the model, and `hazards = "refuse"`
makes it a refusal. It is asked about small models only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from packager import parity
from packager.goldens import Array, GoldenCase
from packager.hazards import Hazard
from packager.model import Model

MAX_BYTES, MAX_NODES, MAX_ELEMENTS = 1 << 16, 256, 1 << 16
"""The largest file, number of nodes and golden case asked about: the evaluator computes in Python, some operators an
element at a time."""

MAX_REFERENCE_SECONDS = 1.0
"""A loop that takes the reference longer would take the evaluator minutes."""

NEAR_MISS = 1e-2
"""A scaled error up to this may be a kernel's: two honest ones of an operator differ by less."""

SECONDS = 2.0
"""No further case is asked about after so long."""

CODE = "reference-disputed"


def disputes(
    model: Model,
    path: Path,
    answered: Sequence[tuple[GoldenCase, Mapping[str, Array]]],
    rules: Mapping[str, parity.OutputRule],
    seconds: float,
) -> list[Hazard]:
    """A hazard for each output on which the two witnesses disagree, at most one an output.

    Args:
        model: the opened model; ``path`` is its file.
        answered: golden cases, each with what the reference answered.
        rules: how outputs are judged.
        seconds: what one run of the reference took.
    """
    nodes = sum(1 for _ in model.structure.walk())
    elements = max(sum(array.size for array in case.inputs.values()) for case, _ in answered)
    if model.external or model.bytes > MAX_BYTES or nodes > MAX_NODES or elements > MAX_ELEMENTS:
        return []
    if seconds > MAX_REFERENCE_SECONDS:
        return []
    from onnx.reference import ReferenceEvaluator

    found: dict[str, Hazard] = {}
    begun = time.monotonic()
    try:
        evaluator = ReferenceEvaluator(str(path))
        for case, outputs in answered:
            if time.monotonic() - begun > SECONDS:
                break
            names = list(outputs)
            with np.errstate(all="ignore"):
                values = evaluator.run(names, dict(case.inputs))
            for name, value in zip(names, values, strict=True):
                told = _dispute(model, case.name, name, (outputs[name], np.asarray(value)), rules[name])
                if told is not None:
                    found.setdefault(name, told)
    except Exception:  # noqa: BLE001 - a witness that says nothing says nothing against anybody
        return list(found.values())
    return list(found.values())


def _dispute(model: Model, case: str, name: str, sides: tuple[Array, Array], rule: parity.OutputRule) -> Hazard | None:
    reference, other = sides
    if reference.dtype != other.dtype:
        other = other.astype(reference.dtype)  # the evaluator is loose about dtypes, and they are the graph's to say
    far = parity.Tolerance(scaled=max(NEAR_MISS, rule.tolerance.scaled or 0.0))
    told = parity.compare_output(name, other, reference, far, None, rounding=rule.rounding)
    reasons = [reason for reason in told.reasons if not reason.startswith("nothing compared")]
    if not reasons:
        return None
    nodes = [node.label for node in model.structure.graph.nodes if name in node.outputs]
    where = f", made by node {nodes[0]}" if nodes else ""
    return Hazard(
        CODE,
        f"ONNX Runtime and ONNX's reference evaluator disagree on output '{name}'{where}, in golden case '{case}': "
        f"the evaluator answers otherwise: {'; '.join(reasons)}",
        "the golden outputs are ONNX Runtime's; give outputs of the source framework with the goldens to settle it",
    )
