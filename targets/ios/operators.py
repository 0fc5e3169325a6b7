"""What ONNX Runtime's CoreML provider takes when it makes ML Programs, operator by operator.

The list is the one ONNX Runtime 1.24.2 documents (``coreml_supported_mlprogram_ops.md`` in its wheel, kept in step by
a test), the notes of that list as checks. Where the provider's code takes more than it documents, the document is
believed: promising a node to the Neural Engine that then runs on the CPU is the worse mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packager.graph import DTYPES, Node, ValueType

FLOATS = ("float32", "float16")
CASTABLE = (*FLOATS, "int32", "int64")


@dataclass(frozen=True)
class Given:
    """A node with what is known around it: types by value name, and the names of values that are constants."""

    node: Node
    types: Mapping[str, ValueType]
    constants: frozenset[str]

    def dims(self, index: int) -> int | None:
        """Rank of an input, ``None`` where it is unknown or absent."""
        if index >= len(self.node.inputs):
            return None
        kind = self.types.get(self.node.inputs[index])
        return None if kind is None or kind.dims is None else len(kind.dims)

    def dtype(self, index: int) -> str:
        """An input's dtype, empty where it is unknown or absent."""
        kind = self.types.get(self.node.inputs[index]) if index < len(self.node.inputs) else None
        return "" if kind is None else kind.dtype

    def fixed(self, *indices: int) -> bool:
        """Whether the inputs at these places are constants or left out."""
        names = [self.node.inputs[index] for index in indices if index < len(self.node.inputs)]
        return all(not name or name in self.constants for name in names)


Check = Callable[[Given], str | None]
"""Gives the reason why a node isn't taken, or ``None``."""


def _text(node: Node, name: str, default: str) -> str:
    """A text attribute's value."""
    found = node.attribute(name)
    return found.value if found is not None and isinstance(found.value, str) else default


def _none(given: Given) -> str | None:
    return None


def _constant(what: str, *indices: int) -> Check:
    def check(given: Given) -> str | None:
        return None if given.fixed(*indices) else f"{what} must be constant"

    return check


def _pool(given: Given) -> str | None:
    rank = given.dims(0)
    return None if rank in (4, None) else f"only 2D pooling is taken, this is {rank - 2}D"


def _conv(given: Given) -> str | None:
    rank = given.dims(0)
    if rank not in (3, 4, None):
        return f"only 1D and 2D convolutions are taken, this is {rank - 2}D"
    return None if given.fixed(2) else "its bias must be constant"


def _conv_transpose(given: Given) -> str | None:
    node = given.node
    if not given.fixed(1, 2):
        return "its weight and bias must be constant"
    padding = _text(node, "auto_pad", "NOTSET")
    if padding in ("SAME_UPPER", "SAME_LOWER"):
        return f"auto_pad {padding} isn't taken"
    if node.attribute("output_shape") is not None:
        return "output_shape isn't taken"
    extra = node.attribute("output_padding")
    if extra is not None and isinstance(extra.value, tuple) and any(extra.value):
        return "output_padding isn't taken"
    return None


def _gemm(given: Given) -> str | None:
    node = given.node
    if not given.fixed(1):
        return "its input B must be constant"
    scale = [node.attribute(name) for name in ("alpha", "beta")]
    if node.integer("transA", 0) or any(each is not None and each.value != 1.0 for each in scale):
        return "only transA = 0, alpha = 1 and beta = 1 are taken"
    return None


def _pow(given: Given) -> str | None:
    return None if {given.dtype(0), given.dtype(1)} <= {"float32", ""} else "both inputs must be float32"


def _grid_sample(given: Given) -> str | None:
    node = given.node
    if given.dims(0) not in (4, None):
        return "only inputs of rank 4 are taken"
    mode = _text(node, "mode", "linear")
    if mode not in ("linear", "bilinear", "nearest"):
        return f"mode {mode} isn't taken"
    if _text(node, "padding_mode", "zeros") == "reflection" and not node.integer("align_corners", 0):
        return "padding_mode reflection without align_corners isn't taken"
    return None


def _cast(given: Given) -> str | None:
    target = DTYPES.get(given.node.integer("to", 0), "unknown")
    return None if target in CASTABLE else f"a cast to {target} isn't taken"


def _depth_to_space(given: Given) -> str | None:
    return None if given.dims(0) in (4, None) else "only inputs of rank 4 are taken"


def _resize(given: Given) -> str | None:
    """The combinations that its builder names; the document has no list of them."""
    node = given.node
    mode, coordinates = _text(node, "mode", "nearest"), _text(node, "coordinate_transformation_mode", "half_pixel")
    if not given.fixed(1, 2, 3):
        return "its scales or sizes must be constant"
    if mode not in ("nearest", "linear") or given.dims(0) not in (4, None):
        return f"mode {mode} of rank {given.dims(0)} isn't taken"
    if mode == "nearest" and (coordinates, _text(node, "nearest_mode", "round_prefer_floor")) != (
        "asymmetric",
        "floor",
    ):
        return "nearest neighbours are taken only with coordinates 'asymmetric' and nearest_mode 'floor'"
    if mode == "linear" and coordinates not in ("half_pixel", "asymmetric", "align_corners"):
        return f"coordinates '{coordinates}' aren't taken"
    return None


TAKEN: Mapping[str, Check] = {
    "Add": _none, "ArgMax": _none, "AveragePool": _pool, "Clip": _constant("its bounds", 1, 2), "Cast": _cast,
    "Concat": _none, "Conv": _conv, "ConvTranspose": _conv_transpose, "DepthToSpace": _depth_to_space, "Div": _none,
    "Elu": _none, "Erf": _none, "Exp": _none, "Gelu": _none, "Gemm": _gemm, "GlobalAveragePool": _pool,
    "GlobalMaxPool": _pool, "GridSample": _grid_sample, "GroupNormalization": _none, "InstanceNormalization": _none,
    "LayerNormalization": _constant("its scale and bias", 1, 2), "LeakyRelu": _none, "MatMul": _none,
    "Max": _none, "MaxPool": _pool, "Mul": _none, "PRelu": _constant("its slope", 1), "Pow": _pow,
    "Reciprocal": _none, "ReduceMax": _constant("its axes", 1), "ReduceMean": _constant("its axes", 1),
    "ReduceSum": _constant("its axes", 1), "Relu": _none, "Reshape": _constant("its shape", 1), "Resize": _resize,
    "Round": _none, "Shape": _none, "Sigmoid": _none, "Slice": _constant("starts, ends, axes and steps", 1, 2, 3, 4),
    "Softmax": _none, "Softplus": _none, "Split": _constant("its sizes", 1), "Sqrt": _none,
    "Squeeze": _constant("its axes", 1), "Sub": _none, "Tanh": _none, "Transpose": _none,
    "Unsqueeze": _constant("its axes", 1),
}  # fmt: skip
"""Operators of the default domain that the provider takes, each with what it asks of the node."""

WHOLE_NUMBERS = {"Slice": ("int64",), "Cast": ("int32", "int64")}
"""Dtypes of the first input that are taken beside float32 and float16."""
