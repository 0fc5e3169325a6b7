"""The room's own pass: exact equivalents for operators that the CoreML provider leaves to the CPU.

Each rule of :data:`RULES` replaces one node where the replacement gives the same values; where it can't tell (a shape
isn't known, a parameter is computed at run time), the node stays. The pass also writes the inferred shapes into the
file, which plans look at, and what the coverage of the user's own file was, under :data:`BEFORE`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packager.graph import DTYPES, ValueType
from packager.model import Signature, open_model
from packager.room import Step
from packager.targets.ios.coverage import Coverage, coverage_of, types_of
from packager.transform import Context, Outcome
from packager.transform_edit import Edit, given, peek
from packager.transform_files import load
from packager.transform_graphs import all_names, constant
from packager.transform_inference import annotate, infer

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

BEFORE = "packager.coverage"
"""Key of the model's metadata: what Core ML would take of the file as it was given, as JSON."""

Rule = Callable[["ir.Node", Edit], bool]
"""Rewrites a node and says whether it did; a node that was rewritten computes its last step itself."""


@dataclass(frozen=True)
class FitCoreML:
    """Rewrite what the CoreML provider refuses and annotate shapes.

    Before: nothing. After: the signature is the same, and so is every value, up to the rounding of a normalisation
    that is folded into one product and one sum.
    """

    name: Literal["ios/fit-coreml"] = "ios/fit-coreml"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Rewriting for Core ML", (("operators", ", ".join(sorted(RULES))),))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Rewrite; the notes say what was rewritten and what Core ML would have taken before."""
        found = infer(model)
        edit = Edit(found, all_names(model))
        done: Counter[str] = Counter()
        for node in list(model.graph):
            rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            operator = node.op_type
            if rule is not None and rule(node, edit):
                done[operator] += 1
        annotate(model, infer(model))
        before = _before(context)
        model.metadata_props[BEFORE] = json.dumps(before.document(), sort_keys=True)
        notes = [f"Core ML would take {before.text()} of the model as it was given"]
        if done:
            notes.append("rewritten for Core ML: " + ", ".join(f"{count} {name}" for name, count in done.items()))
        return Outcome(model, tuple(notes))


def _before(context: Context) -> Coverage:
    """Coverage of the file the run started from, with the shapes that follow from its inputs."""
    structure = open_model(context.source).structure
    types = types_of(structure)
    for value, known in infer(load(context.source).model).items():
        if value.name:
            types[value.name] = ValueType("tensor", DTYPES.get(known.dtype, ""), known.dims)
    return coverage_of(structure, types)


def _become(node: ir.Node, op_type: str, inputs: list[ir.Value | None], **attributes: object) -> None:
    """Turn a node into another operator in place; it keeps its name and its output."""
    import onnx_ir as ir

    node.op_type = op_type
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    node.attributes.clear()
    node.attributes.update({item.name: item for item in ir.convenience.convert_attributes(attributes)})


def _array(values: object, like: str) -> np.ndarray:
    import numpy as np

    return np.array(values, dtype=like)


def _is_float(node: ir.Node, edit: Edit) -> bool:
    return edit.dtype(node.inputs[0]) in ("float32", "float16")


def _flatten(node: ir.Node, edit: Edit) -> bool:
    """A matrix cut at ``axis`` is a Reshape to two sizes, one of which may be left to be found."""
    dims = edit.dims(node.inputs[0])
    if dims is None:
        return False
    axis = peek(node, "axis", 1)
    axis += len(dims) if axis < 0 else 0
    sizes = [
        math.prod(int(dim) for dim in part if isinstance(dim, int)) if all(isinstance(dim, int) for dim in part) else -1
        for part in (dims[:axis], dims[axis:])
    ]
    if sizes == [-1, -1] or 0 in sizes:
        return False
    _become(node, "Reshape", [node.inputs[0], edit.constant(node, _array(sizes, "int64"), "shape")])
    return True


def _negated(node: ir.Node, edit: Edit, value: ir.Value | None) -> ir.Value:
    minus = edit.constant(node, _array(-1, edit.dtype(value)), "minus")
    return edit.before(node, "Mul", [value, minus])


def _neg(node: ir.Node, edit: Edit) -> bool:
    if not _is_float(node, edit):
        return False
    minus = edit.constant(node, _array(-1, edit.dtype(node.inputs[0])), "minus")
    _become(node, "Mul", [node.inputs[0], minus])
    return True


def _abs(node: ir.Node, edit: Edit) -> bool:
    if not _is_float(node, edit):
        return False
    _become(node, "Max", [node.inputs[0], _negated(node, edit, node.inputs[0])])
    return True


def _min(node: ir.Node, edit: Edit) -> bool:
    """min(a, b) = -max(-a, -b)."""
    if not _is_float(node, edit):
        return False
    dtype = edit.dtype(node.inputs[0])
    highest = edit.before(node, "Max", [_negated(node, edit, value) for value in node.inputs])
    _become(node, "Mul", [highest, edit.constant(node, _array(-1, dtype), "minus")])
    return True


def _hard_sigmoid(node: ir.Node, edit: Edit) -> bool:
    """max(0, min(1, alpha * x + beta)), as its definition says."""
    if not _is_float(node, edit):
        return False
    alpha, beta = peek(node, "alpha", 0.2), peek(node, "beta", 0.5)
    _become(node, "Clip", _line(node, edit, alpha, beta))
    return True


def _line(node: ir.Node, edit: Edit, alpha: float, beta: float) -> list[ir.Value | None]:
    """Inputs of a Clip of ``alpha * x + beta`` to 0 and 1."""
    dtype = edit.dtype(node.inputs[0])
    slope = edit.before(node, "Mul", [node.inputs[0], edit.constant(node, _array(alpha, dtype), "alpha")])
    line = edit.before(node, "Add", [slope, edit.constant(node, _array(beta, dtype), "beta")])
    return [line, edit.constant(node, _array(0, dtype), "low"), edit.constant(node, _array(1, dtype), "high")]


def _hard_swish(node: ir.Node, edit: Edit) -> bool:
    """x * HardSigmoid(x) with alpha 1/6 and beta 0.5, as its definition says."""
    if not _is_float(node, edit):
        return False
    gate = edit.before(node, "Clip", _line(node, edit, 1 / 6, 0.5))
    _become(node, "Mul", [node.inputs[0], gate])
    return True


def _batch_norm(node: ir.Node, edit: Edit) -> bool:
    """With constant statistics, x * a + b by channel, where a = scale / sqrt(variance + epsilon), b = bias - mean * a.

    Computed in float64 and rounded once.
    """
    import numpy as np

    dims = edit.dims(node.inputs[0])
    tensors = [constant(given(node, index)) for index in (1, 2, 3, 4)]
    if dims is None or len(dims) < 2 or any(each is None for each in tensors) or not _is_float(node, edit):
        return False
    scale, bias, mean, variance = (tensor.numpy().astype(np.float64) for tensor in tensors)
    factor = scale / np.sqrt(variance + peek(node, "epsilon", 1e-5))
    shape, dtype = [-1, *[1] * (len(dims) - 2)], edit.dtype(node.inputs[0])
    factors = edit.constant(node, factor.reshape(shape).astype(dtype), "factor")
    offsets = edit.constant(node, (bias - mean * factor).reshape(shape).astype(dtype), "offset")
    product = edit.before(node, "Mul", [node.inputs[0], factors])
    node.resize_outputs(1)
    _become(node, "Add", [product, offsets])
    return True


def _reciprocal(node: ir.Node, edit: Edit) -> bool:
    """1 / x as a division: Core ML's own inverse adds 1e-4 to x, and the provider leaves it at that."""
    if not _is_float(node, edit):
        return False
    one = edit.constant(node, _array(1, edit.dtype(node.inputs[0])), "one")
    _become(node, "Div", [one, node.inputs[0]])
    return True


def _gather(node: ir.Node, edit: Edit) -> bool:
    """One index along an axis is a Slice of length one, squeezed."""
    tensor, dims = constant(given(node, 1)), edit.dims(node.inputs[0])
    if tensor is None or tensor.numpy().ndim or dims is None or not _is_float(node, edit):
        return False
    axis = peek(node, "axis", 0) % len(dims)
    index, size = int(tensor.numpy()), dims[axis]
    if not isinstance(size, int):
        return False
    index += size if index < 0 else 0
    places = [edit.constant(node, _array([number], "int64"), hint) for number, hint in (
        (index, "start"), (index + 1, "end"), (axis, "axis"))]  # fmt: skip
    row = edit.before(node, "Slice", [node.inputs[0], *places])
    _become(node, "Squeeze", [row, places[2]])
    return True


RULES: dict[str, Rule] = {
    "Abs": _abs, "BatchNormalization": _batch_norm, "Flatten": _flatten, "Gather": _gather,
    "HardSigmoid": _hard_sigmoid, "HardSwish": _hard_swish, "Min": _min, "Neg": _neg, "Reciprocal": _reciprocal,
}  # fmt: skip
"""Operators that are rewritten."""
