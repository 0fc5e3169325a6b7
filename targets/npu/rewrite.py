"""An exact equivalent of what the NPU computes wrongly, put into the copy of the model that is quantised.

Found by comparing every tensor of a quantised model between ONNX Runtime on CPU and QNN's HTP emulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packager.model import Signature
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_graphs import all_names, fresh, replace_value

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class ReciprocalAsDiv:
    """Reciprocal becomes the division that it is: a quantised one came back eight times too small.

    QNN makes a division of it too, and chooses the scale of its 1 by itself; here the quantiser does.
    """

    name: str = "npu/reciprocal-as-div"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Rewriting Reciprocal as Div, which QNN scales rightly")

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Rewrite in place; the note says how many."""
        taken = all_names(model)
        found = [node for node in model.graph if node.op_type == "Reciprocal" and not node.domain]
        for node in found:
            _divide(model, node, taken)
        return Outcome(model, (f"{len(found)} Reciprocal rewritten as Div",) if found else ())


def _divide(model: ir.Model, node: ir.Node, taken: set[str]) -> None:
    """``1 / x`` in place of the node, under its name."""
    import onnx_ir as ir

    value, output = node.inputs[0], node.outputs[0]
    dtype = ir.DataType.FLOAT if value is None or value.dtype is None else value.dtype
    one = ir.tensor(np.ones((), dtype.numpy()), name=fresh(f"{node.name}_one", taken))
    held = ir.Value(name=one.name, shape=ir.Shape(()), type=ir.TensorType(dtype), const_value=one)
    model.graph.register_initializer(held)
    made = ir.Node("", "Div", [held, value], num_outputs=1, name=node.name)
    made.outputs[0].name = fresh(f"{output.name}_divided", taken)
    made.outputs[0].type, made.outputs[0].shape = output.type, output.shape
    model.graph.insert_before(node, made)
    replace_value(output, made.outputs[0], model.graph, taken)
    model.graph.remove(node, safe=True)
