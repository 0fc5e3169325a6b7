"""Shapes: symbolic dims pinned to sizes, and what becomes constant by that folded away.

Pinning states sizes; folding makes use of them. Folding evaluates nodes with constant inputs in ONNX Runtime without
optimisation, one at a time, which is what the reference run does with them: the folded model answers bit for bit as
before. It trusts shapes inferred from the inputs only (see :mod:`packager.transform_inference`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packager.model import Signature
from packager.room import Step
from packager.shapes import pin_shapes
from packager.transform import Context, Outcome
from packager.transform_files import dims_of, signature_of
from packager.transform_folding import fold_graph
from packager.transform_inference import annotate, consistent, infer

if TYPE_CHECKING:
    import onnx_ir as ir

    from packager.graph import Dim

MAX_ROUNDS = 20
"""Each round folds what the shapes of the one before uncovered; real models settle in two to four."""


@dataclass(frozen=True)
class PinShapes:
    """Replace symbolic dims by sizes, on inputs, outputs and everywhere between.

    Before: keys of ``shapes`` are symbols of the inputs, or ``input:axis`` for a dim without a name; sizes are at
    least 1. After: inputs and outputs are as :func:`packager.shapes.pin_shapes` says; nothing else changed.
    """

    shapes: tuple[tuple[str, int], ...]
    name: Literal["pin-shapes"] = "pin-shapes"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Pinning shapes", tuple((key, str(size)) for key, size in self.shapes))

    def signature(self, before: Signature) -> Signature:
        """Dims replaced.

        Raises:
            Refused: a key names no free dim, or a size is below 1.
        """
        return pin_shapes(before, self.shapes)

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Pin, then infer shapes anew; a note tells of outputs that can't have the size they are declared with."""
        import onnx_ir as ir

        promised = self.signature(signature_of(model))
        sizes = {key: size for key, size in self.shapes if ":" not in key}
        sizes |= {key: size for key, size in self.shapes if key in signature_of(model).symbols()}
        for graph in model.graphs():
            for value in (*graph.inputs, *graph.outputs, *(made for node in graph for made in node.outputs)):
                if value.shape is not None:
                    value.shape = ir.Shape([_pinned(dim, sizes) for dim in dims_of(value.shape) or ()])
        specs = {spec.name: spec for spec in (*promised.inputs, *promised.outputs)}
        for value in (*model.graph.inputs, *model.graph.outputs):
            spec = specs.get(value.name or "")
            if spec is not None and spec.dims is not None:
                value.shape = ir.Shape(spec.dims)
        found = infer(model)
        annotate(model, found)
        notes: list[str] = []
        for value in model.graph.outputs:
            known, declared = found.get(value), dims_of(value.shape)
            if known is None or known.dims is None or declared is None:
                continue
            wrong = len(declared) != len(known.dims) or any(
                isinstance(one, int) and isinstance(other, int) and one != other
                for one, other in zip(declared, known.dims, strict=True)
            )
            if wrong:
                notes.append(
                    f"output '{value.name}' is declared {list(declared)} but will be {list(known.dims)} at these sizes"
                )
        return Outcome(model, tuple(notes))


def _pinned(dim: Dim, sizes: dict[str, int]) -> Dim:
    return sizes.get(dim, dim) if isinstance(dim, str) else dim


@dataclass(frozen=True)
class Fold:
    """Compute ahead what doesn't depend on the inputs' values: shape arithmetic, casts of constants, constant Ifs.

    No folded tensor takes more than ``max_bytes``, all together at most ``total_bytes``, and weights that are kept in
    a small dtype and cast at run time are left so. Quantize and dequantize
    nodes, random ones, loops and anything outside ai.onnx stay as they are. A node that makes a graph output stays,
    so an output is never a bare constant. Before: nothing. After: the signature is the same.
    """

    max_bytes: int = 1 << 20
    total_bytes: int = 16 << 20
    name: Literal["fold"] = "fold"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Folding constants", (("largest constant", f"{self.max_bytes} bytes"),))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Fold until nothing changes; the note counts what went.

        At pinned sizes a branch that is never taken may contradict itself (it was made for another size). Folding
        would bring that to light and the model would no longer load, so branches are then left as they are.
        """
        before = sum(1 for _ in model.graph.all_nodes())
        notes: list[str] = []
        trial = model.clone()
        self._fold(trial, inside=True)
        if consistent(trial) or not consistent(model):
            model = trial
        else:
            self._fold(model, inside=False)
            notes.append("branches and loop bodies weren't folded: at these sizes one of them contradicts itself")
        removed = before - sum(1 for _ in model.graph.all_nodes())
        if removed:
            notes.append(f"folding removed {removed} of {before} nodes")
        return Outcome(model, tuple(notes))

    def _fold(self, model: ir.Model, *, inside: bool) -> None:
        left, found = self.total_bytes, infer(model)
        for _ in range(MAX_ROUNDS):
            changed, spent = fold_graph(model, found, max_bytes=self.max_bytes, total=left, inside=inside)
            left -= spent
            if not changed:
                break
            found = infer(model)
        annotate(model, found)


@dataclass(frozen=True)
class Annotate:
    """Write the types and shapes that follow from inputs and constants into the file, for plans that look at them.

    Before: nothing. After: the signature and everything computed are the same.
    """

    name: Literal["annotate"] = "annotate"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Annotating shapes")

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Infer and write."""
        annotate(model, infer(model))
        return Outcome(model)
