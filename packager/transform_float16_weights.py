"""Weights rounded to half precision and stored in float32 still: for targets that halve the file themselves.

Such a toolchain stores as float16 what it finds to be float32 and computes in float32. With weights that are whole
numbers of float16 steps already, storing them so loses nothing more: what the rounding cost is measured on this model,
in ONNX Runtime, and what remains is the target's own doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packager.float16_rewrite import STORED_ELEMENTS
from packager.float16_rules import constant, largest
from packager.model import Signature
from packager.room import Step
from packager.transform import Context, Outcome

if TYPE_CHECKING:
    import onnx_ir as ir

_SHOWN = 3


@dataclass(frozen=True)
class HalfWeights:
    """Round float32 constants of ``min_elements`` or more to the nearest float16; those beyond 65504 stay."""

    min_elements: int = STORED_ELEMENTS

    @property
    def name(self) -> str:
        """``fp16-weights``."""
        return "fp16-weights"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Rounding weights to fp16", (("constants", f"of {self.min_elements} elements or more"),))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Round."""
        import onnx_ir as ir

        rounded, beyond = 0, []
        for graph in model.graphs():
            made = (value for node in graph if node.op_type == "Constant" for value in node.outputs)
            for value in (*graph.initializers.values(), *made):
                tensor = constant(value)
                if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < self.min_elements:
                    continue
                if largest(tensor) > float(np.finfo(np.float16).max):
                    beyond.append(f"'{value.name}'")
                    continue
                _store(value, to_half_steps(tensor))
                rounded += 1
        more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
        left = f"not rounded, beyond float16: {', '.join(beyond[:_SHOWN])}{more}"
        return Outcome(model, (f"{rounded} constants were rounded to fp16", *([left] if beyond else [])))


def to_half_steps(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A float32 tensor rounded to nearest even float16; made when it is saved, not kept in memory."""
    import onnx_ir as ir

    def convert() -> ir.TensorProtocol:
        array = np.asarray(tensor.numpy()).astype(np.float16).astype(np.float32)
        return ir.Tensor(array, dtype=ir.DataType.FLOAT, name=tensor.name)

    return ir.LazyTensor(convert, ir.DataType.FLOAT, ir.Shape(tensor.shape), name=tensor.name)


def _store(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    import onnx_ir as ir

    node = value.producer()
    if node is None:
        value.const_value = tensor
        return
    node.attributes.clear()
    node.attributes["value"] = ir.AttrTensor("value", tensor)
